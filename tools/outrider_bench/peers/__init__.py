"""Other engines that do the same work, each in a child process (``outrider bench peers``)."""
