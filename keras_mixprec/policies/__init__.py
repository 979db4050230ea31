"""Which dtype each layer computes in: global policy, rules, plan, hardware.

A policy for new layers comes from `scope.py`; a model that exists follows a
policy, or a plan, by `apply.py`. Rules say which layers keep a policy of their
own; the first match wins. A plan is the result: layer path -> policy, with the
reason for each.

A path such as `encoder/block_1/dense` names one layer of a model: rules match
it, and plans, logs and verdicts all name layers by it.

Variables keep their dtype: weights are float32, and a layer casts them when it
is called.

Files:

- `scope.py`: `set_global_policy` and `policy_scope`: the policy that new layers
  follow, and the rules that go with it.
- `rules.py`: `PrecisionRules`, which layers keep a policy of their own.
- `default_rules.py`: layers that stay in float32 by default, and why.
- `apply.py`: `apply_policy`, for a model that exists.
- `set_policies.py`: gives each layer of a model the policy that was decided on
  for it, by rules or a plan.
- `plan.py`: `PrecisionPlan`, read, compared and applied.
- `plan_file.py`: here a plan is written to its file, at once or not at all.
- `layers.py`: walks a model's layers and gives each one stable path; which
  names the code gave, and which Keras made.
- `graph.py`: a layer's place in its model's graph.
- `casts.py`: layers whose casts fail, or cost more than 16 bits save.
- `names.py`: names of dtype policies: which exist, which one a layer follows.
- `rescaled.py`: `RescaledPolicy`, a layer in 16 bits on inputs times a power
  of two.
- `summary.py`: `precision_summary`, the table of layers and dtypes.
- `multiply_adds.py`: estimates of a layer's FLOPs, for the shares of them.
- `hardware.py`: `recommend_policy`: capabilities in, recommendation out.
- `matmul_precision.py`: the precision of float32 products: setter, scope.
- `graph_rewrite.py`: TensorFlow's graph-level mixed precision, and environment
  variables for it that nothing reads any more.
"""
