"""Ways in which a Parquet file comes to harm: pyarrow raises another class of exception for each."""

DAMAGES = ("end", "footer", "pages", "byte")


def damage(path, where):
    """Cut the end of a file off, overwrite its footer or its pages, or flip one bit of a text."""
    content = bytearray(path.read_bytes())
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    if where == "end":
        del content[-4:]
    elif where == "footer":
        content[footer : footer + 40] = b"\x5a" * 40
    elif where == "byte":
        content[content.index(b"summary")] ^= 1
    else:
        content[4:footer] = bytes(footer - 4)
    path.write_bytes(content)
