"""One store for many machines: chunk KV in Valkey, Redis or an object storage, under each machine's own tiers."""
