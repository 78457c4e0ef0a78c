"""What an engine does when its device fails or is stuck."""
