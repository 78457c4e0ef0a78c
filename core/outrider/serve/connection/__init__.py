"""The connection between a server and its engine: messages, clients, and the engine's loop."""
