"""The connection between a server and its engine: messages, clients on the server's side, and the engine's loop."""
