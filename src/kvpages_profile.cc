// SPDX-License-Identifier: Apache-2.0
// Bodies of the profile, cluster, bank and metrics functions of kvpages.h.
#include <cmath>
#include <cstring>

#include "abi/context.h"
#include "core/json.h"
#include "kvpages.h"
#include "metrics/metrics.h"
#include "profile/bank.h"
#include "profile/clusters.h"
#include "profile/kv_quant.h"
#include "profile/profile.h"

using namespace kvpages;       // NOLINT(google-build-using-namespace): this file is the namespace's face in C
using namespace kvpages::abi;  // NOLINT

namespace {

struct ProfileObject {
  InstanceRef instance;
  std::shared_ptr<const Profile> profile;
};
struct ClustersObject {
  InstanceRef instance;
  QuantizedClusters clusters;
};
struct BankObject {
  InstanceRef instance;
  ClusterBank bank;
};

// A caller's array of exactly `count` elements.
template <typename T>
Result<std::span<T>> OutOf(T* out, size_t out_len, uint64_t count, const char* argument) {
  if (out_len != count) {
    return MakeError(Code::kBuffer, argument, "must hold exactly " + std::to_string(count) + " elements", std::to_string(out_len))
        .Expected(std::to_string(count));
  }
  return std::span<T>(out, out_len);
}

template <typename T>
Status CopyAll(const T* data, uint64_t count, T* out, size_t out_len, const char* argument) {
  KVP_ASSIGN(const std::span<T> to, OutOf(out, out_len, count, argument));
  if (count != 0) std::memcpy(to.data(), data, to.size_bytes());
  return Ok();
}

Result<KvMode> ModeOf(const char* mode, size_t mode_len) { return FindKvMode(View(mode, mode_len), "mode"); }
Result<bool> CompatOf(const char* compat, size_t compat_len) { return IsGen1(View(compat, compat_len), "compat"); }
Result<int64_t> CountArgument(double value, const char* argument) { return Integer(value, 0, int64_t{1} << 53, argument); }

const char* TypeName(ValueType type) { return type == ValueType::f64 ? "f64" : type == ValueType::f32 ? "f32" : "f16"; }

void List(Json& json, std::string_view name, const std::vector<int32_t>& indices) {
  json.Key(name).Open('[');
  for (const int32_t index : indices) json.Value(index);
  json.Close(']');
}

Result<QuantizedCluster*> ClusterAt(ClustersObject& object, double index) {
  KVP_ASSIGN(const int64_t at, Integer(index, 0, static_cast<int64_t>(object.clusters.clusters.size()) - 1, "index"));
  return &object.clusters.clusters[static_cast<size_t>(at)];
}

// Hands out runs of one list.
class Runs {
 public:
  Runs(const int32_t* indices, size_t count) : left_(indices, count) {}
  Result<std::span<const int32_t>> Take(int64_t count) {
    if (count < 0 || static_cast<uint64_t>(count) > left_.size()) {
      return MakeError(Code::kShape, "indices", "must hold as many as counts says", Text(static_cast<int64_t>(left_.size())) + " left for " + Text(count));
    }
    const auto run = left_.first(static_cast<size_t>(count));
    left_ = left_.subspan(static_cast<size_t>(count));
    return run;
  }
  Status Finish() const {
    if (left_.empty()) return Ok();
    return MakeError(Code::kShape, "indices", "must hold as many as counts says", Text(static_cast<int64_t>(left_.size())) + " more");
  }

 private:
  std::span<const int32_t> left_;
};

Status CheckCounts(size_t ids_len, size_t counts_len, size_t per_cluster) {
  if (counts_len == ids_len * per_cluster) return Ok();
  return MakeError(Code::kShape, "counts", "must hold " + Text(static_cast<int64_t>(per_cluster)) + " counts per cluster",
                   Text(static_cast<int64_t>(counts_len)) + " for " + Text(static_cast<int64_t>(ids_len)) + " clusters");
}

}  // namespace

// A tensor of these functions in the parameters NAME, NAME_type and NAME_dims.
#define KVP_TENSOR(target, name, argument) \
  KVP_ASSIGN(const Values target, MakeValues(name, name##_len, View(name##_type, name##_type_len), {name##_dims, name##_dims_len}, argument))

// ---- One scale for a tensor ----

int32_t kvp_kv_quantize(const uint8_t* data, size_t data_len, const char* data_type, size_t data_type_len,
                        const int64_t* data_dims, size_t data_dims_len, const char* mode, size_t mode_len, const char* compat,
                        size_t compat_len, uint8_t* codes, size_t codes_len, double* scale, size_t scale_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const KvMode kind, ModeOf(mode, mode_len));
    KVP_ASSIGN(const bool gen1, CompatOf(compat, compat_len));
    KVP_TENSOR(tensor, data, "tensor");
    KVP_ASSIGN([[maybe_unused]] const auto room, OutOf(scale, scale_len, 1, "scale"));
    KVP_ASSIGN(const double made, QuantizeKv(tensor, kind, gen1, {codes, codes_len}, "tensor"));
    return PutOne(scale, scale_len, made, "scale");
  });
}

int32_t kvp_kv_dequantize(const uint8_t* codes, size_t codes_len, double scale, const char* mode, size_t mode_len, float* out,
                          size_t out_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const KvMode kind, ModeOf(mode, mode_len));
    return DequantizeKv({codes, codes_len}, scale, kind, {out, out_len});
  });
}

int32_t kvp_kv_error_per_token(uint32_t instance, const uint8_t* data, size_t data_len, const char* data_type,
                               size_t data_type_len, const int64_t* data_dims, size_t data_dims_len, const char* mode,
                               size_t mode_len, const char* compat, size_t compat_len, double* errors, size_t errors_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto owner, Get<Instance>(instance, "instance"));
    KVP_ASSIGN(const KvMode kind, ModeOf(mode, mode_len));
    KVP_ASSIGN(const bool gen1, CompatOf(compat, compat_len));
    KVP_TENSOR(tensor, data, "tensor");
    return KvErrorPerToken(tensor, kind, gen1, {errors, errors_len}, owner->budget);
  });
}

// ---- Sorted profiles ----

int32_t kvp_profile_fit(uint32_t instance, const uint8_t* data, size_t data_len, const char* data_type, size_t data_type_len,
                        const int64_t* data_dims, size_t data_dims_len, double top_k, const char* family, size_t family_len,
                        double threshold, const char* compat, size_t compat_len, uint32_t* profile, size_t profile_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto owner, Get<Instance>(instance, "instance"));
    ProfileOptions options;
    KVP_ASSIGN(options.gen1, CompatOf(compat, compat_len));
    KVP_ASSIGN(options.top_k, Integer(top_k, -(int64_t{1} << 53), int64_t{1} << 53, "topK"));
    KVP_ASSIGN(options.family, FindFamily(View(family, family_len), "family"));
    options.threshold = threshold;
    KVP_TENSOR(tensor, data, "tensor");
    KVP_ASSIGN(Profile fitted, FitProfile(tensor, options, owner->budget));
    return Publish(std::make_shared<ProfileObject>(ProfileObject{owner, std::make_shared<Profile>(std::move(fitted))}), profile, profile_len);
  });
}

int32_t kvp_profile_info(uint32_t profile, uint32_t* blob, size_t blob_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<ProfileObject>(profile, "profile"));
    const Profile& it = *object->profile;
    Json json;
    json.Open('{').Key("dims").Open('[');
    for (const int64_t dim : it.dims) json.Value(dim);
    json.Close(']').Field("type", TypeName(it.source)).Field("d", it.d).Field("fallback", it.fallback);
    json.Field("headCount", it.head_count()).Field("tailCount", it.n_tail).Field("indexBytes", it.index_bytes);
    if (!it.fallback) {
      const bool gaussian = it.tail.family == TailFamily::gaussian;
      json.Field("family", FamilyName(it.tail.family));
      json.Field(gaussian ? "mu" : "k", it.tail.first).Field(gaussian ? "sigma2" : "theta", it.tail.second);
    }
    json.Field("byteLength", ProfileBytes(it)).Field("generation", it.gen1 ? 1 : 2).Close('}');
    return PublishBlob(json.Take(), blob, blob_len);
  });
}

int32_t kvp_profile_array(uint32_t profile, const char* name, size_t name_len, uint8_t* out, size_t out_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<ProfileObject>(profile, "profile"));
    const std::string_view which = View(name, name_len);
    const Profile& it = *object->profile;
    const Bytes* bytes = which == "values" ? &it.values : which == "head" ? &it.head : which == "permutation" ? &it.permutation : nullptr;
    if (bytes == nullptr) return MakeError(Code::kArgument, "name", "must be values, head or permutation", std::string(which));
    return CopyOut(bytes->data(), bytes->size(), out, out_len, "out");
  });
}

int32_t kvp_profile_reconstruct(uint32_t profile, uint8_t* out, size_t out_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<ProfileObject>(profile, "profile"));
    const Profile& it = *object->profile;
    KVP_ASSIGN(const auto to, OutOf(out, out_len, static_cast<uint64_t>(it.count) * static_cast<uint64_t>(ValueBytes(it.source)), "out"));
    return Reconstruct(it, to.data());
  });
}

int32_t kvp_profile_serialize(uint32_t profile, uint8_t* out, size_t out_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<ProfileObject>(profile, "profile"));
    return SerializeProfile(*object->profile, {out, out_len});
  });
}

int32_t kvp_profile_parse(uint32_t instance, const uint8_t* bytes, size_t bytes_len, uint32_t* profile, size_t profile_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto owner, Get<Instance>(instance, "instance"));
    KVP_ASSIGN(Profile parsed, ParseProfile({bytes, bytes_len}, owner->budget));
    return Publish(std::make_shared<ProfileObject>(ProfileObject{owner, std::make_shared<Profile>(std::move(parsed))}), profile, profile_len);
  });
}

int32_t kvp_profile_anomaly(uint32_t profile, const uint8_t* data, size_t data_len, const char* data_type, size_t data_type_len,
                            const int64_t* data_dims, size_t data_dims_len, double ratio, double margin, double* figures,
                            size_t figures_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<ProfileObject>(profile, "reference"));
    KVP_TENSOR(tensor, data, "tensor");
    KVP_ASSIGN(const Anomaly report, DetectAnomaly(tensor, *object->profile, ratio, margin, object->instance->budget));
    const double all[3] = {report.d, report.limit, report.is_anomaly ? 1.0 : 0.0};
    return CopyAll(all, 3, figures, figures_len, "figures");
  });
}

int32_t kvp_profile_ks(uint32_t profile, const uint8_t* data, size_t data_len, const char* data_type, size_t data_type_len,
                       const int64_t* data_dims, size_t data_dims_len, double* distance, size_t distance_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<ProfileObject>(profile, "profile"));
    KVP_TENSOR(tensor, data, "tensor");
    if (object->profile->fallback) {
      return MakeError(Code::kArgument, "profile", "must have a fitted tail; this profile fell back to dense values");
    }
    KVP_ASSIGN(const double d, KsAgainst(tensor, 0, object->profile->tail, object->instance->budget, "tensor"));
    return PutOne(distance, distance_len, d, "distance");
  });
}

// ---- Clusters ----

int32_t kvp_clusters_quantize(uint32_t instance, const uint8_t* keys, size_t keys_len, const char* keys_type, size_t keys_type_len,
                              const int64_t* keys_dims, size_t keys_dims_len, const uint8_t* values, size_t values_len,
                              const char* values_type, size_t values_type_len, const int64_t* values_dims, size_t values_dims_len,
                              const int64_t* ids, size_t ids_len, const int64_t* counts, size_t counts_len, const int32_t* indices,
                              size_t indices_len, const uint8_t* outlier_keys, size_t outlier_keys_len, const uint8_t* outlier_values,
                              size_t outlier_values_len, const char* mode, size_t mode_len, const char* compat, size_t compat_len,
                              const char* family, size_t family_len, double tail_top_k, uint32_t* clusters, size_t clusters_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto owner, Get<Instance>(instance, "instance"));
    ClusterOptions options;
    KVP_ASSIGN(options.mode, ModeOf(mode, mode_len));
    KVP_ASSIGN(options.gen1, CompatOf(compat, compat_len));
    KVP_ASSIGN(options.family, FindFamily(View(family, family_len), "family"));
    KVP_ASSIGN(options.tail_top_k, CountArgument(tail_top_k, "tailTopK"));
    KVP_TENSOR(k, keys, "keys");
    KVP_TENSOR(v, values, "values");
    KVP_TRY(CheckCounts(ids_len, counts_len, 2));
    Runs runs(indices, indices_len);
    std::vector<ClusterInput> inputs;
    int64_t outliers = 0;
    for (size_t i = 0; i < ids_len; ++i) {
      ClusterInput& input = inputs.emplace_back();
      input.id = ids[i];
      KVP_ASSIGN(input.members, runs.Take(counts[2 * i]));
      KVP_ASSIGN(input.outliers, runs.Take(counts[2 * i + 1]));
      outliers += counts[2 * i + 1];
    }
    KVP_TRY(runs.Finish());
    ClusterPayload payload;
    Values payload_k, payload_v;
    if (outlier_keys_len + outlier_values_len != 0) {
      std::vector<int64_t> dims = k.dims;
      if (!dims.empty()) dims[0] = outliers;
      KVP_ASSIGN(payload_k, MakeValues(outlier_keys, outlier_keys_len, View(keys_type, keys_type_len), dims, "outlierKeys"));
      KVP_ASSIGN(payload_v, MakeValues(outlier_values, outlier_values_len, View(values_type, values_type_len), dims, "outlierValues"));
      payload = {&payload_k, &payload_v};
    }
    KVP_ASSIGN(QuantizedClusters made, QuantizeClusters(k, v, inputs, payload, options, owner->budget));
    return Publish(std::make_shared<ClustersObject>(ClustersObject{owner, std::move(made)}), clusters, clusters_len);
  });
}

int32_t kvp_clusters_info(uint32_t clusters, uint32_t* blob, size_t blob_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<ClustersObject>(clusters, "clusters"));
    const ClusterReceipt& receipt = object->clusters.receipt;
    Json json;
    json.Open('{').Key("receipt").Open('{').Field("input", receipt.input).Field("member", receipt.member);
    json.Field("outlier", receipt.outlier).Field("tail", receipt.tail).Close('}').Key("clusters").Open('[');
    for (const QuantizedCluster& cluster : object->clusters.clusters) {
      json.Open('{').Field("id", cluster.id).Field("memberCount", cluster.members.size());
      json.Field("outlierCount", cluster.outliers.size()).Field("tailCount", cluster.tail.size()).Close('}');
    }
    json.Close(']').Close('}');
    return PublishBlob(json.Take(), blob, blob_len);
  });
}

int32_t kvp_clusters_indices(uint32_t clusters, double index, const char* name, size_t name_len, int32_t* out, size_t out_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<ClustersObject>(clusters, "clusters"));
    KVP_ASSIGN(const QuantizedCluster* cluster, ClusterAt(*object, index));
    const std::string_view which = View(name, name_len);
    const std::vector<int32_t>* list = which == "members"    ? &cluster->members
                                       : which == "outliers" ? &cluster->outliers
                                       : which == "tail"     ? &cluster->tail
                                                             : nullptr;
    if (list == nullptr) return MakeError(Code::kArgument, "name", "must be members, outliers or tail", std::string(which));
    return CopyAll(list->data(), list->size(), out, out_len, "out");
  });
}

int32_t kvp_clusters_outliers(uint32_t clusters, double index, const char* side, size_t side_len, uint8_t* codes, size_t codes_len,
                              double* scale, size_t scale_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<ClustersObject>(clusters, "clusters"));
    KVP_ASSIGN(const QuantizedCluster* cluster, ClusterAt(*object, index));
    KVP_ASSIGN(const bool is_value, IsValueSide(View(side, side_len), "side"));
    const QuantizedKv& stored = cluster->outlier[is_value];
    KVP_ASSIGN([[maybe_unused]] const auto room, OutOf(scale, scale_len, 1, "scale"));
    KVP_TRY(CopyOut(stored.codes.data(), stored.codes.size(), codes, codes_len, "codes"));
    return PutOne(scale, scale_len, stored.scale, "scale");
  });
}

int32_t kvp_clusters_tail(uint32_t clusters, double index, const char* side, size_t side_len, uint32_t* profile, size_t profile_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<ClustersObject>(clusters, "clusters"));
    KVP_ASSIGN(const QuantizedCluster* cluster, ClusterAt(*object, index));
    KVP_ASSIGN(const bool is_value, IsValueSide(View(side, side_len), "side"));
    if (cluster->tails[is_value] == nullptr) return MakeError(Code::kArgument, "index", "must name a cluster with a tail", Text(index));
    return Publish(std::make_shared<ProfileObject>(ProfileObject{object->instance, cluster->tails[is_value]}), profile, profile_len);
  });
}

int32_t kvp_clusters_verify(double tokens, const int64_t* ids, size_t ids_len, const int64_t* counts, size_t counts_len,
                            const int32_t* indices, size_t indices_len, double* receipt, size_t receipt_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const int64_t count, CountArgument(tokens, "tokens"));
    KVP_TRY(CheckCounts(ids_len, counts_len, 7));
    Runs runs(indices, indices_len);
    std::vector<ClusterTiers> tiers;
    for (size_t i = 0; i < ids_len; ++i) {
      const int64_t* of = counts + 7 * i;
      ClusterTiers& tier = tiers.emplace_back();
      tier.id = ids[i];
      KVP_ASSIGN(tier.members, runs.Take(of[0]));
      KVP_ASSIGN(tier.outliers, runs.Take(of[1]));
      KVP_ASSIGN(tier.tail, runs.Take(of[2]));
      for (int side = 0; side < 2; ++side) {
        tier.stored_outliers[side] = of[3 + side];
        tier.stored_tail[side] = of[5 + side];
      }
    }
    KVP_TRY(runs.Finish());
    KVP_ASSIGN(const ClusterReceipt made, VerifyConservation(tiers, count));
    const double all[4] = {static_cast<double>(made.input), static_cast<double>(made.member), static_cast<double>(made.outlier),
                           static_cast<double>(made.tail)};
    return CopyAll(all, 4, receipt, receipt_len, "receipt");
  });
}

// ---- Bank ----

int32_t kvp_bank_create(uint32_t instance, double kv_heads, double head_dim, double max_clusters, uint32_t* bank, size_t bank_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto owner, Get<Instance>(instance, "instance"));
    BankShape shape;
    KVP_ASSIGN(shape.heads, CountArgument(kv_heads, "kvHeads"));
    KVP_ASSIGN(shape.width, CountArgument(head_dim, "headDim"));
    KVP_ASSIGN(shape.max_clusters, CountArgument(max_clusters, "maxClusters"));
    KVP_ASSIGN(ClusterBank made, ClusterBank::Create(shape, owner->budget));
    return Publish(std::make_shared<BankObject>(BankObject{owner, std::move(made)}), bank, bank_len);
  });
}

int32_t kvp_bank_ingest(uint32_t bank, const uint8_t* keys, size_t keys_len, const char* keys_type, size_t keys_type_len,
                        const int64_t* keys_dims, size_t keys_dims_len, const uint8_t* values, size_t values_len,
                        const char* values_type, size_t values_type_len, const int64_t* values_dims, size_t values_dims_len,
                        double birth_threshold, double merge_threshold, double outlier_top_k, int32_t update, uint32_t* blob,
                        size_t blob_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<BankObject>(bank, "bank"));
    KVP_ASSIGN([[maybe_unused]] const auto room, OutOf(blob, blob_len, 1, "blob"));
    BankOptions options;
    options.birth_threshold = birth_threshold;
    options.merge_threshold = merge_threshold;
    options.update = update != 0;
    KVP_ASSIGN(options.outlier_top_k, CountArgument(outlier_top_k, "outlierTopK"));
    KVP_TENSOR(k, keys, "keys");
    KVP_TENSOR(v, values, "values");
    KVP_ASSIGN(const BankReceipt receipt, object->bank.Ingest(k, v, options));
    Json json;
    json.Open('{').Field("birthed", receipt.birthed).Field("updated", receipt.updated).Key("merged").Open('[');
    for (const auto& [into, from] : receipt.merged) json.Open('[').Value(into).Value(from).Close(']');
    json.Close(']').Key("mergeDistances").Open('[');
    for (const double distance : receipt.merge_distances) json.Value(distance);
    json.Close(']').Field("clusters", receipt.clusters).Field("misfitScalar", receipt.misfit_scalar).Key("perCluster").Open('[');
    for (const BankReceipt::Cluster& cluster : receipt.per_cluster) {
      json.Open('{').Field("misfit", cluster.misfit);
      List(json, "members", cluster.members);
      List(json, "outliers", cluster.outliers);
      json.Close('}');
    }
    json.Close(']').Close('}');
    return PublishBlob(json.Take(), blob, blob_len);
  });
}

int32_t kvp_bank_info(uint32_t bank, uint32_t* blob, size_t blob_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<BankObject>(bank, "bank"));
    const BankShape& shape = object->bank.shape();
    Json json;
    json.Open('{').Field("kvHeads", shape.heads).Field("headDim", shape.width).Field("maxClusters", shape.max_clusters);
    json.Field("clusters", object->bank.clusters()).Close('}');
    return PublishBlob(json.Take(), blob, blob_len);
  });
}

int32_t kvp_bank_array(uint32_t bank, const char* name, size_t name_len, double* out, size_t out_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<BankObject>(bank, "bank"));
    ClusterBank& it = object->bank;
    const std::string_view which = View(name, name_len);
    const int64_t width = it.shape().width;
    const bool count = which == "count", square = which == "covariances";
    if (!count && !square && which != "meanKeys" && which != "meanValues" && which != "keyVariances") {
      return MakeError(Code::kArgument, "name", "must be count, meanKeys, meanValues, keyVariances or covariances", std::string(which));
    }
    const int64_t values = count ? 1 : square ? width * width : width;
    KVP_ASSIGN(const auto to, OutOf(out, out_len, static_cast<uint64_t>(it.shape().heads * it.clusters() * values), "out"));
    double* at = to.data();
    for (int64_t h = 0; h < it.shape().heads; ++h) {
      for (int64_t c = 0; c < it.clusters(); ++c, at += values) {
        const double* from = count                    ? &it.count(h, c)
                             : square                 ? it.sigma_vk(h, c)
                             : which == "meanKeys"   ? it.mu_k(h, c)
                             : which == "meanValues" ? it.mu_v(h, c)
                                                      : it.sigma_kk(h, c);
        std::memcpy(at, from, static_cast<size_t>(values) * sizeof(double));
      }
    }
    return Ok();
  });
}

int32_t kvp_bank_clone(uint32_t bank, uint32_t* out, size_t out_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<BankObject>(bank, "bank"));
    KVP_ASSIGN(ClusterBank copy, object->bank.Clone());
    return Publish(std::make_shared<BankObject>(BankObject{object->instance, std::move(copy)}), out, out_len);
  });
}

// ---- Measures ----

int32_t kvp_metrics_rmse(const uint8_t* a, size_t a_len, const char* a_type, size_t a_type_len, const int64_t* a_dims,
                         size_t a_dims_len, const uint8_t* b, size_t b_len, const char* b_type, size_t b_type_len,
                         const int64_t* b_dims, size_t b_dims_len, double* rmse, size_t rmse_len) {
  return Guard([&]() -> Status {
    KVP_TENSOR(first, a, "a");
    KVP_TENSOR(second, b, "b");
    KVP_ASSIGN(const double made, Rmse(first, second));
    return PutOne(rmse, rmse_len, made, "rmse");
  });
}

int32_t kvp_metrics_error_per_token(const uint8_t* a, size_t a_len, const char* a_type, size_t a_type_len, const int64_t* a_dims,
                                    size_t a_dims_len, const uint8_t* b, size_t b_len, const char* b_type, size_t b_type_len,
                                    const int64_t* b_dims, size_t b_dims_len, double* errors, size_t errors_len) {
  return Guard([&]() -> Status {
    KVP_TENSOR(first, a, "tensor");
    KVP_TENSOR(second, b, "restored");
    return ErrorPerToken(first, second, {errors, errors_len});
  });
}

int32_t kvp_metrics_fidelity(const uint8_t* a, size_t a_len, const char* a_type, size_t a_type_len, const int64_t* a_dims,
                             size_t a_dims_len, const uint8_t* b, size_t b_len, const char* b_type, size_t b_type_len,
                             const int64_t* b_dims, size_t b_dims_len, double* figures, size_t figures_len) {
  return Guard([&]() -> Status {
    KVP_TENSOR(reference, a, "reference");
    KVP_TENSOR(logits, b, "logits");
    KVP_ASSIGN(const LogitFidelity made, Fidelity(reference, logits));
    const double all[4] = {made.top1, made.mean_kl, made.max_kl, static_cast<double>(made.positions)};
    return CopyAll(all, 4, figures, figures_len, "figures");
  });
}

int32_t kvp_metrics_ks_distance(uint32_t instance, const uint8_t* a, size_t a_len, const char* a_type, size_t a_type_len,
                                const int64_t* a_dims, size_t a_dims_len, const uint8_t* b, size_t b_len, const char* b_type,
                                size_t b_type_len, const int64_t* b_dims, size_t b_dims_len, double* distance, size_t distance_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto owner, Get<Instance>(instance, "instance"));
    KVP_TENSOR(first, a, "a");
    KVP_TENSOR(second, b, "b");
    KVP_ASSIGN(const double made, KsDistance(first, second, owner->budget));
    return PutOne(distance, distance_len, made, "distance");
  });
}

int32_t kvp_metrics_memory_ratio(double bits, double block, double scale_bits, double* ratio, size_t ratio_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const double made, MemoryRatio(bits, block, scale_bits));
    return PutOne(ratio, ratio_len, made, "ratio");
  });
}
