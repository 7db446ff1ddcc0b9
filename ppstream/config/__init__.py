"""One TOML file: what may be set, and what must agree, all problems at once.

Not here: anything that depends on the machine or on user code; see ``launch/dry_run.py``.
Start reading at ``schema.py``.
"""

from ppstream.config.schema import PipelineConfig

__all__ = ["PipelineConfig"]
