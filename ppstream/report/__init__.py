"""Shows what ``analysis`` found: text, page, Perfetto, comparisons. The standard library only;
rich colours a terminal where it is installed.

Not here: any judgement; numbers come from ``analysis`` as they are.
Start reading at ``cli.py`` and ``text.py``.
"""
