// The engine of the explorer: what the library means (core) and decides (plan), as JSON. It is
// compiled to WebAssembly for a page, and natively for the test that both say the same.
#pragma once

#include <string>
#include <string_view>

namespace tessera::explorer {

/// Answers one request (request.h): a JSON object; of a request that cannot be answered {"error":
/// {"code", "text"}}. Commands, and their fields besides:
///
///   devices                    what can be named
///   parse     PROBLEM          the text in its shortest form
///   plan      PROBLEM DEVICE   what `tessera plan` prints, and the catalog's rows
///   tiles     PROBLEM DEVICE   of one head: which tiles the kernel skips, masks, takes whole;
///                              batch, head, first (piece), lengths (inputs.h)
///   elements  PROBLEM          the mask, ALiBi and places of a few queries and keys; batch, head,
///                              query, key, queries, keys, alibi, lengths
///   order     PROBLEM DEVICE   pieces of work, who takes them, and when by the planner's costs;
///                              lengths
///   bytes     PROBLEM DEVICE   moved into each fast memory, and what a cache holds; seqlens
///   softmax                    of one row, block by block; scores, values, block, slack, sink
///
/// No answer has more than kMostParts tiles, pieces or elements: "cut" says that there are more.
std::string answer(std::string_view request);

}  // namespace tessera::explorer
