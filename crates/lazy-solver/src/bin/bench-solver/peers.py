"""Solves an LP file with SCIP or HiGHS on one thread to gap 0: prints status, seconds and relative gap as JSON."""

import json
import math
import sys
import time

solver, path, limit = sys.argv[1], sys.argv[2], float(sys.argv[3])
if solver == "scip":
    import pyscipopt

    model = pyscipopt.Model()
    model.hideOutput()
    model.readProblem(path)
    model.setParam("limits/time", limit)
    model.setParam("limits/gap", 0.0)
    start = time.time()
    model.optimize()
    seconds = time.time() - start
    optimal, gap = model.getStatus() == "optimal", model.getGap()
else:
    import highspy

    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("threads", 1)
    model.setOptionValue("time_limit", limit)
    model.setOptionValue("mip_rel_gap", 0.0)
    model.readModel(path)
    start = time.time()
    model.run()
    seconds = time.time() - start
    optimal = model.getModelStatus() == highspy.HighsModelStatus.kOptimal
    gap = model.getInfo().mip_gap
# The solvers print notes of their own: ours stands on a line by itself. JSON knows no infinite numbers.
gap = gap if math.isfinite(gap) and gap < 1e9 else None
print()
print(json.dumps({"optimal": optimal, "seconds": seconds, "gap": gap}), flush=True)
