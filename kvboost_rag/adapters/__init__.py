"""What only the framework integrations and the server share."""
