"""Joins cache, router, cloud and the device's own models: what answers a request, in which order."""
