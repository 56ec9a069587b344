"""Recorded runs that every refactoring of the engine has to reproduce.

``cases.py`` lists the runs, ``records/`` holds what each of them gave, and ``test_replay.py`` runs
them again and compares. ``python -m tests.replay`` records all of them anew, with ``--only NAME``
one of them. A change of behaviour that is wanted changes the records in a commit of its own, which
is reviewed by their diff: a record has one line a step.

What is compared, and how exactly, is said in ``record.py``; where it is taken from, in
``recorder.py``.
"""
