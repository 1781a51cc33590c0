"""The headroom test: what a temperature per token could gain over the best constant, before any temperature is learned.

A temperature τ(x) = τ_c·exp(−δ(x)) changes the cross-entropy of a token, to second order in δ, by −g·δ + ½·v·δ², where

    g = s_y − E_p[s]      v = Var_p[s]      p = softmax(s),  s = L/τ_c,  τ_c the best constant temperature.

The δ that is best to second order is a ridge regression of g/v on features of the context with weights v. It is the
score test of the hypothesis that no function of these features improves on τ_c: E[g | features] = 0 if the model is
calibrated in this direction. From there, a few steps minimise the cross-entropy itself. The features are scalars of the
logits (entropy, largest log-probability, margin, log Var_p[L], largest logit, and their products), the hidden state with
random features of it, or both.

A token is a prediction among candidates, and a document is a group of predictions that may depend on each other. For an
image–text model they are a pair, whose image is a query with captions as candidates or the other way round, and an image
with all its pairs. Logits are then divided by a temperature τ₀ beforehand, so that τ = 1 stands for τ₀.

The fit is cross-fitted: the tokens of a document are judged by coefficients from other folds of documents. Gains are
computed exactly from profiles of the tokens (`profile.py`). Everything is a sum over tokens, so that the data can be
streamed, and memory is O(K·p²) for K folds and p features.
"""
