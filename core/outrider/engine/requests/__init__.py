"""The host's side: requests, who runs when, pages by number. No device memory is touched here."""
