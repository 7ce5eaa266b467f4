"""Known chunks of one model: found in prompts, loaded or computed."""
