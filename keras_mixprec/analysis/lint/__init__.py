"""Checks of a model before training: what 16 bits will break or not speed up.

`findings.py` says what is returned, `model_view.py` what a rule reads,
`rule.py` what a rule is, `table.py` lists all of them.
"""
