"""What a search for culprits has found, and steps with that in float32."""

from collections import defaultdict

from keras_mixprec.backend import active
from keras_mixprec.diagnosis.culprit import computes_low
from keras_mixprec.numerics.dry_step import DryStep, dry_step
from keras_mixprec.numerics.layer_hooks import computing_in, with_sublayers
from keras_mixprec.policies.layers import MODEL_PATH


class SearchState:
    """The culprits so far, in one batch.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        exact: `DryStep` of the whole model in float32, at loss scale 1.
        compiled: Boolean. Whether XLA compiles the model's step.

    Attributes:
        culprits: List of the `Culprit`s found.
        windows: Dict path -> `ScaleWindow` of the layers that are left in
            float16.
        scale_bits: Float. The loss scale that was found or given, as a power
            of two.
        errors: As in `Examination`, as the model is built.
        still: List of `StandsStill`, the variables that are stored in 16 bits
            and move no more.
    """

    def __init__(self, model, data, exact: DryStep, compiled: bool):
        self._model = model
        self._data = data
        self._exact = exact
        self._exact_calls = {call.name: call for call in exact.calls}
        self._compiled = compiled
        self._demoted = []
        self._scale = 1.0
        self._own_errors = None
        # Paths of culprits that are so if their infinities are no masks.
        self._infinite = set()
        self.culprits = []
        self.windows = {}
        self.scale_bits: float | None = None
        self.errors = defaultdict(dict)
        self.still = []

    def _runs(self, demoted):
        try:
            self._dry_step(demoted)
        except active.replay().REFUSALS:
            return False
        return True

    def _note(self, call, direction, error):
        # As the model is built: once a layer is demoted, others see better.
        if error is not None:
            self.errors[call.name].setdefault(direction, error)

    def _as_demoted(self):
        """Context in which a layer contains what it will, not what it did."""
        return computing_in("float32", self._demoted)

    def _dry_step(self, demoted, known=()):
        with computing_in("float32", demoted):
            return dry_step(self._model, self._data, self._scale, known)

    def _low(self, step):
        """The recorded calls that compute in 16 bits, not demoted yet."""
        demoted = {id(layer) for layer in self._demoted}
        return [
            call
            for call in step.calls
            if id(call.layer) not in demoted and computes_low(call.layer)
        ]

    def _demote(self, culprit):
        self.culprits.append(culprit)
        self._demoted += culprit.layers

    def _widen_to_enclosing(self, step, first):
        """Demotes the culprits from `first` on together with enclosing layers.

        If the step does not run without, as above.
        """
        if len(self.culprits) == first or self._runs(self._demoted):
            return
        calls = {call.path: call for call in step.calls}
        demoted = [x for c in self.culprits[:first] for x in c.layers]
        for index, culprit in enumerate(self.culprits[first:], first):
            path, layers = culprit.path, culprit.layers
            while not self._runs([*demoted, *layers]):
                path = enclosing_path(path)
                if path not in calls:
                    break
                layers = with_sublayers(calls[path].layer)
            self.culprits[index] = culprit._replace(layers=layers)
            self._demoted += layers


def enclosing_path(path):
    """Returns the path of the layer that one is inside of, at last the model's.

    Args:
        path: String. `None` is returned for the model's own.
    """
    if path == MODEL_PATH:
        return None
    return path.rpartition("/")[0] or MODEL_PATH
