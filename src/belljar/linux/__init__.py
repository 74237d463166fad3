"""Kernel facilities, one a file. Nothing here knows what a policy is."""
