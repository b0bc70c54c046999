"""The HTTP side of the gateway: routes, schemas, middleware, connections and streams."""
