// SPDX-License-Identifier: Apache-2.0
// Special functions in float64 that the C++ library lacks. Own code and not Boost.Math: its headers add 43 kB and the
// stream library's start-up code to the WebAssembly module.
#pragma once

namespace kvpages {

double NormalCdf(double x);
// Inverse of NormalCdf; -inf at 0, +inf at 1.
double NormalQuantile(double p);

double Digamma(double x);   // x > 0
double LogGamma(double x);  // x > 0; safe on several threads, as lgamma is not

// Regularized lower incomplete gamma function P(a, x), a > 0; 0 for x <= 0.
double GammaCdf(double a, double x);
// x with P(a, x) = p.
double GammaQuantile(double a, double p);

}  // namespace kvpages
