// Stream capture and graphs.
//
// While a stream captures, work put on it is not run but becomes part of a graph. A graph is kept as the list of its
// pieces in the order of their capture, which is one of the orders that its edges allow, and replayed in that order.
#pragma once

#include "streams.h"

namespace emulated {

struct Graph {
  std::vector<Piece> pieces;
};

// How far into each stream of a capture something depends on: the number of pieces captured there.
using Coverage = std::map<CUstream_st*, size_t>;

struct CapturedEvent {
  std::shared_ptr<Capture> capture;
  Coverage covered;
};

// True if the stream is capturing and the piece has become part of the graph; sets `error` if the capture is invalid.
bool add_to_capture(CUstream_st* stream, const Piece& piece, cudaError_t* error);

EMULATED_EXPORT bool is_capturing(cudaStream_t stream);

// Null if the stream is not capturing.
std::shared_ptr<CapturedEvent> record_in_capture(CUstream_st* stream);
cudaError_t wait_in_capture(CUstream_st* stream, const std::shared_ptr<CapturedEvent>& event);

void invalidate_capture(CUstream_st* stream);

// Whether a "potentially unsafe" call is refused because somebody captures; it then invalidates the capture too.
// With a stream: a call that asks for the state of that stream, which is never possible while it captures.
cudaError_t unsafe_call(CUstream_st* stream = nullptr);

}  // namespace emulated
