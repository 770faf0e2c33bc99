// Serves the requests of stdin with one model: connects reader, engine, output, stop signals and ranks.
#pragma once

#include "line_io.h"
#include "options.h"
#include "protocol.h"
#include "ranks/link.h"
#include "step_model.h"
#include "stop_signals.h"

namespace xllm_worker {

// Call before the model is loaded. Until serve(), a signal fails the requests that wait in stdin, and ends the process
// with 128 + number. `output` must outlive `signals`.
void report_signals_of_start(ProtocolOutput& output, StopSignals& signals);

// Writes the events to `output` until the end of stdin or a signal; then shuts the model down. `link` connects the
// ranks; null with one rank. When a step does not end after a signal, it ends the process with 128 + number.
void serve(const WorkerOptions& options,
           const ServerInfo& info,
           StepModel& model,
           ProtocolOutput& output,
           StopSignals& signals,
           RankLink* link = nullptr);

}  // namespace xllm_worker
