"""Other engines on the same work, each in a child process (``outrider bench peers``). None of them is imported elsewhere."""
