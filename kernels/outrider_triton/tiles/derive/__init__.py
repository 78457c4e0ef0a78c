"""Derived tile configurations: candidates that fit a device, ranked by estimates from its facts."""
