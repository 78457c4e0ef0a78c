"""Proposers: they draft tokens for each request, and the target model verifies these tokens in the same iteration."""
