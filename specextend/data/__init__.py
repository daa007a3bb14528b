"""Documents in, summaries out: audits, prompts, schemas, atomic parts, finalize and the fingerprint."""
