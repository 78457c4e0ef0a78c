"""Further APIs of the server, translated to chat requests and from their message deltas.

The routes are OpenAI's Responses and Anthropic's Messages.
"""
