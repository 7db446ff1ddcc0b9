"""Policies and pipelines as data, named in a configuration as ``ppstream_stages.module:attr``."""
