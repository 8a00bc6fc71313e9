"""The sampler as compiled commands, in the order in which a table runs them. Steps are those of `sampling.definition`.

    module                   command       work
    stage_1_edit             scan          steps 2 to 4: masks, biases, penalties; the largest logit of each group
    stage_2_candidates       narrow        step 5, and rows without filters: the token; other rows: candidates, which
                                           are a superset of the tokens that their filters keep
    stage_3_filter_and_draw  choose        steps 6 to 10 on the candidates: temperature, filters, noise, the largest
    stage_4_logprobs         score, merge  log-probabilities of the rows that request them
    advance                  await_mask    before stage 1: wait for the masks of grammars
                             advance       after a step of a multi-step: make its tokens the next step's input
                             accept        after an entry of a step with drafts: continue if the draft was right

`launch` makes the commands and their arguments. `filters` has the filters of stages 2 and 3, and all stages share
`exact_math`.
"""
