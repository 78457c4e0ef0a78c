"""Text and media: tokenizer, chat templates, images and videos, and vision towers."""
