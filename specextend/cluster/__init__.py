"""The job: a pure scheduler, a driver that writes the output, and Ray actors with engines."""
