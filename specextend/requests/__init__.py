"""Requests for the engine: how documents become requests, and outcomes become rows."""
