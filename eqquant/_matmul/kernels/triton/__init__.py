"""The kernel in Pallas-Triton, which is deprecated.

Only its rows in `dispatch.py` know this folder.
"""
