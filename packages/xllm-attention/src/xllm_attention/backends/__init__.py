"""Built-in attention backends, one package each. Models never import from here; `create_backend` does."""
