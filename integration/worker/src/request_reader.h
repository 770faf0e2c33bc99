// Reads requests and commands from a descriptor into the engine's inbox.
#pragma once

#include "inbox.h"
#include "line_io.h"
#include "protocol.h"

namespace xllm_worker {

// Starts the thread that parses the lines of `fd`. Closes the inbox at the end of the input. `inbox` must outlive it.
inline LineReader read_requests(int fd, const RequestLimits& limits, Inbox& inbox) {
  return LineReader(
      fd,
      limits.max_line_bytes(),
      [&inbox, limits](std::string_view line, int64_t number) { inbox.put(parse_input_line(line, number, limits)); },
      [&inbox, limits](int64_t number) { inbox.put(refuse_long_line(number, limits)); },
      [&inbox] { inbox.close(); });
}

}  // namespace xllm_worker
