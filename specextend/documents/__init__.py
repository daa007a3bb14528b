"""Files of many kinds become a data set of documents in Parquet; start at `preparation.py`."""
