"""All decoder layers of a draft step as one kernel, for few tokens on 4-bit copies.

models.py says for which models; drafting.py runs it; layout.py lays out weights; launch.py compiles and launches the
kernel, whose parts are the .cu files (exchange.cu begins it and explains weights and words; attention.cu, with keys.cu
and parts.cu, is attention; trunk.cu is the loop over layers)."""
