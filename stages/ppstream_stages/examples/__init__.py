"""Robots of other ecosystems on the pipeline, one file each, to read and to start from.

None of them imports its library at import time; a test runs each against a stand-in.
"""
