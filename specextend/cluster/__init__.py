"""The job: a pure scheduler, a driver that alone writes the output, and Ray actors that each hold
an engine.
"""
