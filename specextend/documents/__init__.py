"""Conversion of files to documents in Parquet; begin at `preparation.py`."""
