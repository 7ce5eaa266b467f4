"""Forwards through the model's own code: the probe, partial forwards, their attention."""
