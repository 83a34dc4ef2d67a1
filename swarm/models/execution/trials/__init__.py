"""Finding the best `ExecutionStrategy` for some loaded blocks: every candidate is tried on them before it is used.

There is no list of families. A short schedule (prompts of different lengths, then single tokens of several sessions at
once) runs through a model of each candidate. A candidate is kept if its outputs are right and, where that is the
question, if it is faster. If it fails or differs, the slower way that works for every family stays. Each candidate is a
`SpanModel` of its own around the same weights, so a trial never changes a model that serves. The strategy that is
chosen says what was tried, and why it is used or not (`ExecutionStrategy.trials`).
"""
