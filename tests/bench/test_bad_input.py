"""Arguments that the benchmarks refuse, and the messages of their errors."""

import shlex

import pytest

CASES = """
decode --batch 1,x | --batch is '1,x'
decode --batch 0 | --batch is '0'
decode --batch '' | --batch is empty
decode --new-tokens 0 | --new-tokens is 0
decode --prompt-tokens -1 | --prompt-tokens is '-1'
decode --new-tokens 1 | --new-tokens 1 is too few
decode --backend no-such-chip | --backend is 'no-such-chip'
startup --shape no-such-shape | --shape is 'no-such-shape'
startup --speculate mtp | --speculate is 'mtp'
startup --shape tiny --directory /proc | --directory is '/proc', and no files can be written there
startup --shape tiny --directory /proc/x | --directory is '/proc/x', and no files can be written
startup --shape tiny --checkpoint /proc/x | checkpoint of tiny in /proc/x can't be read or written
decode --accept-length 3 | --accept-length is synthetic and goes with --shape alone
decode --shape gpt-9 | --shape is 'gpt-9'
decode --shape tiny --accept-length 9 | --accept-length is 9
decode --shape tiny --accept-length 2 --speculate none | needs drafts to accept
decode --shape tiny --speculate ngram | --speculate ngram has no random weights
decode --shape tiny --speculate dflash | --draft-layers is 5; each layer of a block drafter reads one of
decode --shape tiny --draft-weights fp8 --speculate none | --draft-weights says what a draft's weights are
decode --shape tiny --draft-layers 1 | it goes with --shape and --speculate dflash
decode --shape tiny --model . | --model doesn't go with --shape
decode --shape tiny --draft-topk 2 | drafts chains alone
peers --engines outrider,outrider | --engines is 'outrider,outrider'
peers --speculate ngram | --speculate is 'ngram'
peers --phases decode,rest | --phases is 'decode,rest'
peers --prompts 9-2 | --prompts is '9-2'
peers --speculate mtp | --speculate mtp is for a shape with the head in its checkpoint, as qwen3.5-27b
peers --prefill-batches 16 | --prefill-batches is '16'; expected numbers of prompts and of their tokens
peers --vllm-arguments '[1]' | --vllm-arguments is '[1]'; expected a JSON object
peers --vllm-python /nowhere/python | --vllm-python is '/nowhere/python'; there is no such file
peers --accept-length 5 | --accept-length is 5; with 3 drafted tokens it is 1 to 4
peers --plot x.png | expected a file that ends in .svg
peers --plot x.svg --phases mixed | add decode, context, prefill
peers --plot /nowhere/x.svg | --plot is '/nowhere/x.svg'; nothing can be written in '/nowhere'
peers --batch 8 --max-requests 2 | --max-requests is 2, and --batch 8 requests decode together
peers --phases decode,context --contexts 99999999 | a request of --contexts and --new-tokens has 100000
peers --phases mixed --max-context 9 | a request of --prompts and --outputs has 1436 tokens, and 9 are there
peers --keep /proc/x | --keep is '/proc/x', and no files can be written there
peers --so-far /nowhere/x.json | --so-far is '/nowhere/x.json'; nothing can be written in '/nowhere'
peers --so-far x.svg --plot ./x.svg | --so-far is 'x.svg', another file of this command
peers --memory -3 | --memory is -3.0; expected a number above 0, at most 1
prefill --prompt-tokens 8,x | --prompt-tokens is '8,x'
prefill --plot x.png | expected a file that ends in .svg
mixed --prompts 20-3 | --prompts is '20-3'
mixed --shape tiny --speculate none --draft-vocabulary 9 | --draft-vocabulary says which draft tokens
decode --shape tiny --draft-vocabulary 9x | --draft-vocabulary is '9x'; there is no such file
decode --draft-vocabulary 99999 | and the target has tokens 0 to 2047; expected tokens of the target
mixed --accept-length 2 | --accept-length is synthetic
prefill --plot /nowhere/x.svg | --plot is '/nowhere/x.svg'; nothing can be written in '/nowhere'
decode --plot /nowhere/x.svg | --plot is '/nowhere/x.svg'; nothing can be written in '/nowhere'
prefill --prompt-tokens 8,90 --max-context 64 | --prompt-tokens 90 and the 8 tokens after them
decode --prompt-tokens 8,90 --max-context 64 | in the context of 64: they are 154; ask for fewer
mixed --prompts 9-9 --outputs 8-8 --max-context 16 | --prompts 9 and --outputs 8 tokens
decode --shape tiny --speculate none --draft-length load | drafts nothing; leave draft_
mixed --shape tiny --draft . | --draft doesn't go with --shape
prefill --prompt-tokens 2041 | --prompt-tokens 2041 and the 8 tokens after them don't fit
mixed --prompts 9000-9000 | in the context of 2048: they are 9
prefill --shape tiny --prompt-tokens 99999999 | --prompt-tokens 99999999 and the 8 tokens after
decode --shape tiny --new-tokens 99999999 | and --new-tokens 99999999 don't fit in the context of
serve --shape tiny --new-tokens 99999999 | and --new-tokens 99999999 don't fit in the context of
serve --url localhost:8000 --model m | --url is 'localhost:8000'; expected where a server
serve --url https://a --model m | without TLS
serve --url http://a:port --model m | --url is 'http://a:port'
serve --url '' --model m | --url is empty
serve --model m | --model is what a server at --url calls its model
serve --logs /proc/x | --logs is '/proc/x', and no files can be written there
peers --quantize fp8 | --quantize is for outrider and vllm, not for transformers
peers --quantize fp3 --engines outrider | --quantize is 'fp3'
peers --draft-weights fp8 --engines vllm | --draft-weights is for drafts of outrider
peers --draft-weights fp8 --speculate none | --draft-weights is for drafts of outrider
peers --draft-vocabulary 9 --speculate none | --draft-vocabulary is for drafts of outrider
peers --lm-head | --lm-head says what --quantize takes too
peers --shape llama-3.2-1b --quantize fp8 --lm-head --engines vllm | is its embedding
"""


@pytest.mark.parametrize("case", CASES.strip().splitlines())
def test_bad_input(outrider, case):
    arguments, message = case.split(" | ")
    backend = () if "--backend" in arguments else ("--backend", "cpu")
    result = outrider("bench", *shlex.split(arguments), *backend)
    assert (result.code in (1, 2), result.out) == (True, "")
    assert message in result.err
