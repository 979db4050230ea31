"""The log of a training run, written so that TensorBoard reads it, and read.

That imports no backend and no Keras: `tensorboard.summary` and its
`EventFileWriter` import the whole of TensorFlow wherever it is installed,
which costs seconds and memory in a run on JAX or PyTorch. Who reads a log knows
nothing of it but its schema.

Files that write:

- `run_log.py`: `RunLog`, what the monitor writes, in one place; `NoLog`
  discards everything.
- `event_file.py`: TensorBoard's event files: records, checksums, and where a
  run stopped.
- `append_file.py`: files that wait for a full disk.
- `summaries.py`: the protocol buffers that TensorBoard draws.
- `schema.py`: the names of what a run's folder holds.
- `layer_tables.py`: what was measured of each layer, by step, of bounded size.
- `text_formats.py`: JSON that every reader accepts, and tables in Markdown.

Files that read:

- `run_files.py`: the tables of a run, and which runs there are.
- `run_data.py`, `run_layers.py`: what a log says of a run and of its layers, as
  the page asks for it; `grid.py`: one metric of all layers by step.
- `bad_input.py`: readings of batches that were not finite; `skipped_steps.py`:
  how many steps were skipped, and at which loss scales.
- `clock.py`: when steps were taken, by time of training.
- `run_ranges.py`, `format_limits.py`: the range of each layer's numbers, and
  those of formats; `what_if.py`: what layers would do in another format.
- `run_summary.py`: a run as a row of the table of runs; `runs_table.py`: that
  table as text.
- `passed_on.py`: layers that pass on what another one made not finite.
- `fixes.py`: what repairs a finding, as code.
- `event_kinds.py`: every kind of event, with its fields and its sentence.
- `event_rows.py`, `figures.py`: what events say, and the key figures of a run;
  `worth.py`: what two runs tell of each other.
- `read_events.py`: events and rows of layers, checked as they are read.
- `facts.py`, `headline.py`, `run_counts.py`: the run in one sentence: the
  cause, what was done about it, what it cost.
- `lowered_scale.py`: what a loss scale that fell far has cost gradients.
- `flat_loss.py`: whether the loss stood still.
- `what_next.py`: what a tuner did, and what is left to do.
- `performance.py`: how fast a run was, from the rows that were logged of it.
- `report.py`: `load_report`; `verdict_lines.py`: the verdicts in its text.
- `report_page.py`: the page of the tab with its data in it.
- `report_plot.py`: the loss scale as a picture, for where no page is shown.
"""
