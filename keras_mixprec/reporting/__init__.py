"""Writes and reads the log of a training run, and reports on the run.

This package imports neither a backend nor Keras. The package avoids
`tensorboard.summary` and its `EventFileWriter`, because both import all of
TensorFlow if it is installed.

Files that write the log:

- `run_log.py`: `RunLog`, which the monitor writes to; `NoLog` discards
  everything.
- `event_file.py`: TensorBoard's event files.
- `append_file.py`: append-only files, and a queue of writes for a full disk.
- `summaries.py`: the protocol buffers that TensorBoard draws.
- `schema.py`: the names in the folder of a run.
- `dashboards.py`: the charts and tables of TensorBoard's own tabs.
- `layer_tables.py`: measurements of each layer by step.
- `text_formats.py`: strict JSON, and tables in Markdown.

Files that read the log. Findings are computed from facts, and cards show facts
and findings. No function changes another function's results.

- `run_files.py`: the tables of a run, and the list of runs; `event_kinds.py`:
  every kind of event, with its fields and its sentence, and the checks of
  events and rows.
- `run.py`: `Run`, the frozen record of a run; `layers.py`: its layers, and
  which one is to blame; `bad_input.py`: non-finite batches.
- `facts.py`, `headline.py`: the run in one sentence; `what_next.py`: advice,
  also as code; `flat_loss.py`, `performance.py`: other findings.
- `told.py`: the list of events; `cards.py`: the content of text, page, notebook
  and `to_dict`.
- `low_scale.py`: loss scales that fell far; `bad_batches.py`: the names of
  batches with bad inputs; `training_summary.py`: the console after `fit`.
- `report.py`: `load_report`; `report_page.py`: the page of the tab with its
  data; `runs.py`: the table of runs.
- `what_if.py`, `format_limits.py`: predictions for other formats, and plans.
"""
