"""Why each private attribute of Keras is needed, by what has it."""

# Read or written by the functions of this package, by what has them.
PRIVATE = {
    "keras.Layer": {
        "_dtype_policy": "the public setter changes a map that layers share",
        "_flatten_layers": "only models list what is inside of their layers",
        "_inbound_nodes": "the calls of a layer in a graph, not the first only",
        "_layers": "only models list their layers",
        "_loss_ids": "by which a layer knows the losses that it has added",
        "_non_trainable_variables": "without those of the layers inside",
        "_seed_generators": "the random state of a layer, which it only saves",
        "_trainable_variables": "without those of the layers inside",
    },
    "keras.DTypePolicy": {
        "_variable_dtype": "no policy is float32 with 16-bit variables",
    },
    "keras.layers.InputLayer": {
        "_dtype": "what a `Sequential` casts its input to, without a setter",
    },
    "keras.KerasTensor": {
        "_dtype": "what a functional model casts its input to, no setter",
        "_keras_history": "the layer that has made a tensor of a graph",
    },
    "tensor of keras.activations.softmax on tensorflow": {
        "_keras_logits": "what TensorFlow's cross-entropies use instead of it",
    },
    "keras.Sequential": {
        "_functional": "the graph that a `Sequential` has when it is built",
    },
    "keras.src.models.Functional": {
        "_nodes_by_depth": "which calls of its layers belong to a graph",
        "_inputs_struct": "the inputs as they were given, not as a list",
        "_outputs_struct": "the outputs likewise",
    },
    "keras.Model": {
        "_compile_config": "`model.save` stores the optimizer that it holds",
        "_compile_loss": "it makes the metrics of several losses when built",
        "_loss_tracker": "the metric of the loss; users may name one so too",
        "_symbolic_build": "builds on a batch as `fit` does, running nothing",
    },
    "keras.Model on jax": {
        "_get_jax_state": "what `train_step` is given on JAX",
        "_jax_state_synced": "whether variables hold what `fit` has reached",
    },
    "keras.Variable": {
        "_dtype": "what is stored; `dtype` cannot be set, and is cast in calls",
        "_maybe_autocast": "`value` is this, of what is stored",
        "_value": "`assign` copies, and `value` casts",
    },
    "keras.optimizers.Optimizer": {
        "_get_variable_index": "a variable's place among those it was built on",
        "_iterations": "`iterations` counts windows, not their micro-batches",
        "_learning_rate": "`learning_rate` calls a schedule, of any kind",
        "_track_variable": "variables that were set, not added, need it",
        "_trainable_variables": "the variables that it updates",
    },
    "keras.optimizers.Optimizer that accumulates": {
        "_accumulated_gradients": "a window starts over when they are zeros",
    },
    "keras.metrics.Metric": {
        "_variables": "`variables` is a copy, from which none can be removed",
    },
    "keras.callbacks.Callback": {
        "_model": "`model` writes the state of a JAX model back each time",
    },
    "keras.src.trainers.data_adapters.array_data_adapter.ArrayDataAdapter": {
        "_inputs": "the arrays that were given to `fit`",
    },
    "keras.src.trainers.epoch_iterator.EpochIterator": {
        "_enumerate_iterator": "where batches are fetched from in an epoch",
    },
}

# Present only during `fit`, so that no test finds it on a model.
IN_FIT = {
    "_jax_state": "the values of the variables in `fit` on JAX",
    "_eval_epoch_iterator": "the data that `fit` validates on",
}

# Read, written or overridden through `self` in subclasses of Keras' classes.
INHERITED = {
    "keras.optimizers.Optimizer": {
        "_check_variables_are_known": "raises for those it was not built on",
        "_iterations": "saved in the place where Keras' optimizer saves it",
        "_learning_rate": "saved in the place where Keras' optimizer saves it",
        "_trainable_variables": "`build` replaces that of Keras",
        "_trainable_variables_indices": "`build` replaces that of Keras",
        "_track_variable": "two optimizers may share a loss scale",
        "_var_key": "how Keras looks a variable up",
        "_variables": "its own variables, without the inner optimizer's",
    },
    "keras.src.saving.keras_saveable.KerasSaveable": {
        "_obj_type": "what the attributes that may hold it are found by",
    },
    "keras.callbacks.Callback": {
        "_model": "a copy of a callback has none",
    },
}
