"""The plugin: what it serves to the page."""

from tensorboard import errors, plugin_util
from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from keras_mixprec.reporting.report_page import bundle, static
from keras_mixprec.reporting.run_data import MAX_COLUMNS, RunData
from keras_mixprec.reporting.run_ranges import run_ranges
from keras_mixprec.reporting.schema import PLUGIN_NAME
from keras_mixprec.reporting.text_formats import parse_json, to_json
from keras_mixprec.tensorboard_plugin.provider_source import (
    ProviderSource,
    ReadTags,
    last_written,
)

# No name of a run or a layer is longer.
_LONGEST = 4096


class MixedPrecisionPlugin(base_plugin.TBPlugin):
    """Serves runs, as `MixPrecMonitor` logs them, to the page.

    | route | answer |
    |---|---|
    | `data/runs` | the runs |
    | `data/run?run=` | all of a run but its measurements by step |
    | `data/heat?run=&metric=&columns=` | one metric of all layers by step |
    | `data/histogram?run=&layer=&part=` | exponents of a layer by step |
    | `data/ranges?run=` | the range of each layer over the run |

    Args:
        context: TensorBoard's `TBContext`.
    """

    plugin_name = PLUGIN_NAME

    def __init__(self, context):
        self._provider = context.data_provider
        self._read = ReadTags()
        # One script instead of thirty, which take 0.2 s to ask for. Types are
        # not guessed by `mimetypes`, which on Windows asks the registry: a
        # module that comes as text/plain does not load.
        self._files = {
            "page.js": (f"{bundle()}\nexport {{ render }};", "text/javascript"),
            "style.css": (static("style.css"), "text/css"),
        }

    def is_active(self):
        """TensorBoard finds by itself that there are data."""
        return False

    def frontend_metadata(self):
        """What the tab is called, and where its page begins."""
        return base_plugin.FrontendMetadata(
            es_module_path="/static/page.js", tab_name="Mixed Precision"
        )

    def get_plugin_apps(self):
        """The routes."""
        return {
            "/static/*": self._answer(self._static),
            "/data/runs": self._answer(self._runs),
            "/data/run": self._answer(self._run),
            "/data/heat": self._answer(self._heat),
            "/data/histogram": self._answer(self._histogram),
            "/data/ranges": self._answer(self._ranges),
        }

    def _static(self, request):
        name = request.path.rpartition("/static/")[2]
        if name not in self._files:
            raise errors.NotFoundError("No such file")
        return http_util.Respond(request, *self._files[name])

    def _answer(self, respond):
        @wrappers.Request.application
        def app(request):
            _check_method(request)
            return respond(request)

        return app

    def _runs(self, request):
        listed = self._provider.list_tensors(
            **_asked(request), plugin_name=PLUGIN_NAME
        )
        runs = [
            {
                "run": run,
                "newer_schema": _is_newer(tags.values()),
                "written": last_written(tags.values()),
            }
            for run, tags in sorted(listed.items())
        ]
        return http_util.Respond(request, to_json(runs), "application/json")

    def _run(self, request):
        overview = self._data(request).overview()
        return http_util.Respond(request, to_json(overview), "application/json")

    def _heat(self, request):
        columns = _argument(request, "columns")
        if not columns.isdecimal() or not 0 < int(columns[:9]) <= MAX_COLUMNS:
            raise errors.InvalidArgumentError(
                f"`columns` must be an integer from 1 to {MAX_COLUMNS}. "
                f"Received: columns={columns[:80]!r}"
            )
        metric = _argument(request, "metric")
        heat = _found(self._data(request).heat, metric, int(columns))
        return http_util.Respond(request, heat, "application/octet-stream")

    def _histogram(self, request):
        layer, part = _argument(request, "layer"), _argument(request, "part")
        found = _found(self._data(request).histogram, layer, part)
        return http_util.Respond(request, to_json(found), "application/json")

    def _ranges(self, request):
        found = run_ranges(self._data(request), MAX_COLUMNS)
        return http_util.Respond(request, to_json(found), "application/json")

    def _data(self, request):
        run = _argument(request, "run")
        source = ProviderSource(
            self._provider, _asked(request), run, self._read
        )
        if not source.contents:
            raise errors.NotFoundError(f"No such run. Received: run={run!r}")
        data = RunData(run, source)
        if data.newer_schema:
            raise errors.InvalidArgumentError(
                "A newer version of keras_mixprec wrote this run: update it."
            )
        return data


class _MethodNotAllowedError(errors.PublicError):
    http_code = 405


def _is_newer(tags):
    contents = (parse_json(tag.plugin_content, dict) for tag in tags)
    return RunData.is_newer(contents)


def _asked(request):
    return {
        "ctx": plugin_util.context(request.environ),
        "experiment_id": plugin_util.experiment_id(request.environ),
    }


def _argument(request, name):
    value = request.args.get(name)
    if not value or len(value) > _LONGEST:
        raise errors.InvalidArgumentError(
            f"`{name}` must be given, with at most {_LONGEST} characters. "
            f"Received: {name}={(value or '')[:80]!r}"
        )
    return value


def _found(read, *arguments):
    try:
        return read(*arguments)
    except KeyError as error:
        raise errors.NotFoundError(f"Nothing is known of {error}") from error


def _check_method(request):
    if request.method not in ("GET", "HEAD"):
        raise _MethodNotAllowedError(f"Only GET. Received: {request.method}")
