"""What only a GPU can prove, in stages that run one after the other, each in a process of its own.

`__main__`, `supervisor`, `stage`, `stage_process` and `replayed_speed` import the standard library alone: where torch
cannot be imported, there is still a summary that says so.
"""
