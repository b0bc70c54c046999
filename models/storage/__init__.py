"""Files of weights and components: safetensors, manifests, hubs, licenses. No code in them is executed."""
