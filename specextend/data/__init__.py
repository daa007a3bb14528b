"""Documents in, summaries out: checks, prompts, schemas, commits, finalize and the fingerprint."""
