"""The HTTP server: application, middleware, protocol and web page."""
