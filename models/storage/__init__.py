"""Files of weights and components: safetensors, manifests, hubs, licenses. Nothing read here is executed."""
