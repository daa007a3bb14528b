"""The job: a pure scheduler, one driver that alone writes, Ray actors that each hold an engine."""
