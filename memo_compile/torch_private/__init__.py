"""Every private torch API that memo uses, a file for each part of torch.

A file says in which versions it was read. What differs between them is settled here only.
"""
